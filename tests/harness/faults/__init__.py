"""Long fault injection: what the learner promises is tried, fault by fault."""

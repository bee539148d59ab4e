"""The learner: checkpoints, resuming and logging around xpm-torch's ``Learner``."""

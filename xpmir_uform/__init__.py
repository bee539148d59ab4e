"""Train small multimodal embedding models reproducibly, as experimaestro tasks."""

"""What the recipes share: model loading, checkpoints, batches, step statistics."""

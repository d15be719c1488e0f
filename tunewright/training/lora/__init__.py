"""Adapters on a frozen model: what the recipe lora has beside what recipes share."""

"""From rows to sealed tokens: reading, rendering, masks, packing, the token store."""

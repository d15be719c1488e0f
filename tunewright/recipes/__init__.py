"""One page per recipe. Recipes are siblings that do not know each other."""

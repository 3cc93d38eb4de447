"""Page movement by definition: element by element, through the layout's own addresses."""

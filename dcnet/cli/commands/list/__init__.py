"""Show what there is: operators, models, datasets, recipes, and runs."""

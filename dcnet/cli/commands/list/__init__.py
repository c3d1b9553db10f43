"""Show what there is: operators, margins, models, datasets, recipes, and runs."""

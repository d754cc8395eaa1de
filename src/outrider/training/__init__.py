"""Training of heads for a target: prompts, answers, features, recipes, loop, export."""

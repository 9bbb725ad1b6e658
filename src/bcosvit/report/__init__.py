"""Reports, tables and pictures of explanations and evaluations."""

"""What estimators of advantages get of the credit."""

"""What a model can do, measured."""

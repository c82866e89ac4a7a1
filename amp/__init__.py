"""Mixed precision: formats, policy, autocast, loss scaling."""

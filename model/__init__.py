"""One GPT, several ways to compute its gradients."""

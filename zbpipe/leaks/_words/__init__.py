"""Chains of holders in words. Looks at objects by their types alone: no repr, no equality, no property of them runs."""

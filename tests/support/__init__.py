"""What test modules share: the oracle, the model that ranks train, what starts processes. No test is here.

Found on `pythonpath`, of pyproject.toml; a rank's script finds it by the PYTHONPATH that `processes.run_ranks` gives it.
"""

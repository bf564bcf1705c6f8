"""What a researcher runs: simulated federations of the five tasks, compared and reported."""

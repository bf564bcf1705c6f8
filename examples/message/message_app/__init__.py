"""A Message-API app: modulated learning first, then the app's own FedAvg."""

"""A NumPyClient-based app with modulated learning in place of FedAvg."""

"""Critics: value networks and their trainers, and generalized advantage estimation."""

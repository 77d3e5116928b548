"""What is claimed, as programs; results, with hardware and commit, are in results/."""

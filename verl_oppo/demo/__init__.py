"""The embedded default: toy assets made on first use, and the runner behind scripts/demo.sh."""

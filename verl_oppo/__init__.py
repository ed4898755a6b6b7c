"""OPPO for verl: pipeline overlap inside and between PPO steps (arXiv 2509.25762), as a plugin of verl 0.9."""

"""Model folders: loading and storing weights, differences between architectures, chat templates, merging."""

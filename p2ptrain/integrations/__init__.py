"""Other people's trainers, unchanged but for one callback. Each file needs an extra of its own."""

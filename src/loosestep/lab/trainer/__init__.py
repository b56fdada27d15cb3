"""The reference trainer: data, model and loop for any strategy, on one machine or many."""

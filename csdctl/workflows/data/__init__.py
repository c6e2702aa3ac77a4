"""Prepare data and models, and send files to the machines that need them."""

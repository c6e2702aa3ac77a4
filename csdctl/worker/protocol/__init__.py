"""The messages between csdctl and its worker: run specs, tasks, events and orders, as plain dataclasses."""

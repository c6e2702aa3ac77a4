"""What csdctl and its worker exchange: run specs, tasks, events and orders, as plain dataclasses."""

"""Read an Ansible inventory with the same results as Ansible, without Ansible."""

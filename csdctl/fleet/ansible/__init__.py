"""Read an Ansible inventory as Ansible does, without Ansible."""

"""An existing Ansible inventory as nodes: read as Ansible reads it, without Ansible."""

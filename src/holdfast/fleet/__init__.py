"""Making sandboxes: templates, engines that create and remove them, pools of warm ones, leases and pruning."""

"""The protocol of the session service: `holdfast.session.v1` is made from proto/ by `make proto`."""

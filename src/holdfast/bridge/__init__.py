"""The model bridge: programs in a sandbox without network or keys talk to models through the host.

This folder is the host's side. The proxy inside only packs and relays HTTP; every decision is taken here.
"""

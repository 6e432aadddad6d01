"""The main loop of Hopper: wgmma."""

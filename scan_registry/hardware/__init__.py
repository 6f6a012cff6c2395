"""What code is chosen for and launched on: targets, devices, and the driver with its launcher."""

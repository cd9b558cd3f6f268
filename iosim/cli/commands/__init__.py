"""The commands of iosim: one file each, named as the command is."""

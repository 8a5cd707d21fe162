"""The ground floor: errors, files, flags, devices, units of an exchange, codes, closed forms."""

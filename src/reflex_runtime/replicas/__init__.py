"""One policy server as several processes: a front that accepts connections, and replicas that own a device each."""

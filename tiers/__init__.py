"""Where bytes live: device pool, host pool, stores."""

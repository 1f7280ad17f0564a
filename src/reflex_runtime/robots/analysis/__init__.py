"""Tools that examine policies and recordings without serving: doctor, replay, report."""

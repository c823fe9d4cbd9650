"""What devices that are not here would take: computed, not measured."""

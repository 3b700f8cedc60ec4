"""What is wrong with a plan, a machine's table, or what was asked of them."""


class PlanningError(ValueError):
    """Base of what the planner's side raises; each message names the mistake and the fix."""

"""Stages after the batch: tracks, zones and lines, and stages of your own. Each feed has its own, called in order of
its frames on its pipeline's thread, so a slow one makes a camera drop frames before they are computed."""

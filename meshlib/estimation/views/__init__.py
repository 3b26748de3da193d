"""Estimates for people: tables, profiles, traces, scaling, whole runs, cautions."""

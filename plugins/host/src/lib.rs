//! Finds, checks, loads and lists host-op plugins and adapts them to the engine

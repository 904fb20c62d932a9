//! End-to-end tests of qhx against goldens made by another program

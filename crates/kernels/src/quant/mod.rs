//! The scalar meaning of every quantised block.

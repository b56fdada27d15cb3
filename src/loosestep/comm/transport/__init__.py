"""How bytes reach another member of a group: sockets, shared memory."""

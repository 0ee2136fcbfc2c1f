/* listen.h - the socket that clients connect to. */
#ifndef AFF_SERVER_LISTEN_H
#define AFF_SERVER_LISTEN_H
#include "base/status.h"

/* A listening socket. host: a numeric IPv4 or IPv6 address, "localhost", NULL (127.0.0.1), or "unix:PATH". *port: 0
 * takes any free one and says which; 0 for a Unix socket.
 *
 * PATH gets the permissions `mode` before anybody can connect. A socket that a killed process left there is replaced;
 * one on which somebody listens, and any other kind of file, is an error. */
aff_status aff__listen(const char *host, int *port, unsigned mode, int *fd, aff_error *err);
/* Removes the path of a Unix socket, if it still is that of fd. Call before fd is closed. */
void aff__unlisten(const char *host, int fd);
bool aff__listen_is_unix(const char *host);
#endif

#define _GNU_SOURCE /* SOCK_CLOEXEC */
#include "server/listen.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 511 };
static const char scheme[] = "unix:";

bool aff__listen_is_unix(const char *host)
{
    return host && strncmp(host, scheme, sizeof scheme - 1) == 0;
}

static aff_status open_socket(int family, int *fd, aff_error *err)
{
    *fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *fd >= 0 ? AFF_OK : aff__fail_errno(err, "server: cannot open a socket");
}

/* ---- Internet ---- */

static aff_status inet_address(const char *host, int port, struct sockaddr_storage *a, socklen_t *n, aff_error *err)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)a;
    *a = (struct sockaddr_storage){0};
    if (!host || strcmp(host, "localhost") == 0) host = "127.0.0.1";
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
        *n = sizeof *v4;
        return AFF_OK;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) != 1)
        return aff__fail(err, AFF_E_INVALID, "--host: expected an IPv4 or IPv6 address or unix:PATH, got '%s'", host);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons((uint16_t)port);
    *n = sizeof *v6;
    return AFF_OK;
}

static aff_status listen_inet(const char *host, int *port, int *fd, aff_error *err)
{
    struct sockaddr_storage a;
    socklen_t n;
    const int on = 1;
    AFF_TRY(inet_address(host, *port, &a, &n, err));
    AFF_TRY(open_socket(a.ss_family, fd, err));
    setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (a.ss_family == AF_INET6) setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(*fd, (struct sockaddr *)&a, n) != 0 || listen(*fd, BACKLOG) != 0)
        return aff__fail_errno(err, "%s port %d: cannot listen", host ? host : "127.0.0.1", *port);
    if (getsockname(*fd, (struct sockaddr *)&a, &n) != 0) return aff__fail_errno(err, "server: cannot tell its port");
    *port =
        ntohs(a.ss_family == AF_INET ? ((struct sockaddr_in *)&a)->sin_port : ((struct sockaddr_in6 *)&a)->sin6_port);
    return AFF_OK;
}

/* ---- Unix ---- */

static aff_status unix_address(const char *path, struct sockaddr_un *a, aff_error *err)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (!*path || strlen(path) >= sizeof a->sun_path)
        return aff__fail(err, AFF_E_INVALID, "--host: expected unix:PATH with a path of 1 to %zu bytes, got '%s'",
                         sizeof a->sun_path - 1, path);
    memcpy(a->sun_path, path, strlen(path) + 1);
    return AFF_OK;
}

/* Whether the path may be taken: there is nothing, or a socket on which nobody listens. */
static aff_status may_take(const char *path, const struct sockaddr_un *a, aff_error *err)
{
    struct stat st;
    int fd;
    if (lstat(path, &st) != 0) return errno == ENOENT ? AFF_OK : aff__fail_errno(err, "%s: cannot look at it", path);
    if (!S_ISSOCK(st.st_mode))
        return aff__fail(err, AFF_E_IO, "%s: expected a socket or nothing there, got another kind of file", path);
    AFF_TRY(open_socket(AF_UNIX, &fd, err));
    const bool stale = connect(fd, (const struct sockaddr *)a, sizeof *a) != 0 && errno == ECONNREFUSED;
    close(fd);
    return stale ? AFF_OK : aff__fail(err, AFF_E_IO, "%s: another process listens there", path);
}

/* Bound under a temporary name, so that it appears with its permissions and in one step in place of a stale one. */
static aff_status listen_unix(const char *path, unsigned mode, int *fd, aff_error *err)
{
    struct sockaddr_un a, temporary;
    char name[sizeof a.sun_path + 32];
    AFF_TRY(unix_address(path, &a, err));
    AFF_TRY(may_take(path, &a, err));
    snprintf(name, sizeof name, "%s.%ld", path, (long)getpid());
    AFF_TRY(unix_address(name, &temporary, err));
    AFF_TRY(open_socket(AF_UNIX, fd, err));
    unlink(name);
    if (bind(*fd, (struct sockaddr *)&temporary, sizeof temporary) != 0)
        return aff__fail_errno(err, "%s: cannot listen", path);
    if (chmod(name, (mode_t)mode) == 0 && listen(*fd, BACKLOG) == 0 && rename(name, path) == 0) return AFF_OK;
    const aff_status s = aff__fail_errno(err, "%s: cannot listen", path);
    unlink(name);
    return s;
}

aff_status aff__listen(const char *host, int *port, unsigned mode, int *fd, aff_error *err)
{
    *fd = -1;
    const bool local = aff__listen_is_unix(host);
    if (local) *port = 0;
    const aff_status s =
        local ? listen_unix(host + sizeof scheme - 1, mode, fd, err) : listen_inet(host, port, fd, err);
    if (s != AFF_OK && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    return s;
}

void aff__unlisten(const char *host, int fd)
{
    struct sockaddr_un a;
    int probe;
    if (!aff__listen_is_unix(host) || unix_address(host + sizeof scheme - 1, &a, NULL) != AFF_OK) return;
    shutdown(fd, SHUT_RDWR); /* from here on a connection is refused if the path is this socket's */
    if (open_socket(AF_UNIX, &probe, NULL) != AFF_OK) return;
    if (connect(probe, (struct sockaddr *)&a, sizeof a) != 0 && errno == ECONNREFUSED) unlink(a.sun_path);
    close(probe);
}

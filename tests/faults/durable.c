/* Counts what a command does to the files below one directory, and kills the process at the Nth such operation or makes
   it fail. Loaded into every process of the command by LD_PRELOAD; does nothing until these variables are there:

   FAULTS_ROOT      the directory, absolute and without symbolic links
   FAULTS_COUNTER   a file of 8 bytes that all processes share: how many operations there were
   FAULTS_LOG       a file that gets a line for each, "NUMBER KIND PATH", with " (hit)" behind those that it happens to
   FAULTS_AT        the operation that it happens at, from 1; 0: none
   FAULTS_ERRNO     the error it fails with; 0: the process is killed there. ENOSPC stays: every later operation that
                    needs room fails too.

   A write that the fault hits has written half of its bytes. Writes through mmap are not seen. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char root[PATH_MAX];
static long at, error_number;
static long *counter;
static int log_file = -1;

/* The variables may come late: a process is forked from one that waits, and gets them then. */
static int is_active(void) {
    if (counter) return 1;
    const char *file = getenv("FAULTS_COUNTER"), *below = getenv("FAULTS_ROOT"), *lines = getenv("FAULTS_LOG");
    if (!file || !below || !lines) return 0;
    int shared = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    log_file = syscall(SYS_openat, AT_FDCWD, lines, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (shared < 0 || log_file < 0) abort();
    snprintf(root, sizeof root, "%s", below);
    at = atol(getenv("FAULTS_AT"));
    error_number = atol(getenv("FAULTS_ERRNO"));
    counter = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    return counter != MAP_FAILED;
}

/* The absolute path of a descriptor, or of a path beside it; "" if there is none. */
static void path_of(int descriptor, const char *path, char *absolute) {
    char link[64], directory[PATH_MAX] = "";
    if (path && path[0] == '/') {
        snprintf(absolute, PATH_MAX, "%s", path);
        return;
    }
    if (descriptor == AT_FDCWD) {
        if (!getcwd(directory, sizeof directory)) directory[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, directory, sizeof directory - 1);
        directory[length < 0 ? 0 : length] = 0;
    }
    if (path) snprintf(absolute, PATH_MAX, "%.2000s/%.2000s", directory, path);
    else snprintf(absolute, PATH_MAX, "%s", directory);
}

/* Whether the fault is at this operation. The caller goes on only if it is not, or if errno has the error. */
static int is_hit(const char *name, int needs_room, int descriptor, const char *path) {
    int is_interruptible = strstr("open write fsync truncate reserve", name) != NULL; /* as Linux documents them */
    char absolute[PATH_MAX], line[PATH_MAX + 64];
    int errno_before = errno;
    if (!is_active()) return 0;
    path_of(descriptor, path, absolute);
    if (strncmp(absolute, root, strlen(root))) {
        errno = errno_before;
        return 0;
    }
    long number = __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    int hit = at && number >= at;
    if (error_number == ENOSPC ? !needs_room : number > at) hit = 0;
    if (error_number == EINTR && !is_interruptible) hit = 0;
    const char *mark = hit ? " (hit)" : "";
    int length = snprintf(line, sizeof line, "%ld %s %s%s\n", number, name, absolute + strlen(root), mark);
    syscall(SYS_write, log_file, line, length);
    errno = hit ? error_number : errno_before;
    return hit;
}

static void die(void) {
    if (!error_number) syscall(SYS_kill, getpid(), SIGKILL);
}

#define FAIL_IF_HIT(name, needs_room, descriptor, path)                                                                \
    if (is_hit(name, needs_room, descriptor, path)) {                                                                  \
        die();                                                                                                         \
        return -1;                                                                                                     \
    }

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY; }

#define OPEN(function)                                                                                                 \
    int function(const char *path, int flags, ...) {                                                                   \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        if (writes(flags)) FAIL_IF_HIT("open", 1, AT_FDCWD, path)                                                      \
        return REAL(function)(path, flags, mode);                                                                      \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                                                                               \
    int function(int directory, const char *path, int flags, ...) {                                                    \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        if (writes(flags)) FAIL_IF_HIT("open", 1, directory, path)                                                     \
        return REAL(function)(directory, path, flags, mode);                                                           \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(function)                                                                                                \
    FILE *function(const char *path, const char *mode) {                                                               \
        if (strpbrk(mode, "wa+") && is_hit("open", 1, AT_FDCWD, path)) {                                               \
            die();                                                                                                     \
            return NULL;                                                                                               \
        }                                                                                                              \
        return REAL(function)(path, mode);                                                                             \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *bytes, size_t size) {
    if (is_hit("write", 1, file, NULL)) {
        int error = errno;
        ssize_t half = error == EINTR ? 0 : syscall(SYS_write, file, bytes, size / 2);
        die();
        if (half > 0 && error == ENOSPC) return half; /* a full disk takes what fits, and fails the next time */
        errno = error;
        return -1;
    }
    return REAL(write)(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    FAIL_IF_HIT("write", 1, file, NULL)
    return REAL(writev)(file, parts, count);
}

#define PWRITE(function, offset_type)                                                                                  \
    ssize_t function(int file, const void *bytes, size_t size, offset_type offset) {                                   \
        if (is_hit("write", 1, file, NULL)) {                                                                          \
            int error = errno;                                                                                         \
            if (error != EINTR) syscall(SYS_pwrite64, file, bytes, size / 2, offset);                                  \
            die();                                                                                                     \
            errno = error;                                                                                             \
            return -1;                                                                                                 \
        }                                                                                                              \
        return REAL(function)(file, bytes, size, offset);                                                              \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    FAIL_IF_HIT("write", 1, out, NULL)
    return REAL(sendfile)(out, in, offset, size);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    FAIL_IF_HIT("write", 1, out, NULL)
    return REAL(sendfile64)(out, in, offset, size);
}
ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t size, unsigned flags) {
    FAIL_IF_HIT("write", 1, out, NULL)
    return REAL(copy_file_range)(in, in_offset, out, out_offset, size, flags);
}

int fsync(int file) {
    FAIL_IF_HIT("fsync", 1, file, NULL)
    return REAL(fsync)(file);
}
int fdatasync(int file) {
    FAIL_IF_HIT("fsync", 1, file, NULL)
    return REAL(fdatasync)(file);
}
int ftruncate(int file, off_t size) {
    FAIL_IF_HIT("truncate", 0, file, NULL)
    return REAL(ftruncate)(file, size);
}
int ftruncate64(int file, off64_t size) {
    FAIL_IF_HIT("truncate", 0, file, NULL)
    return REAL(ftruncate64)(file, size);
}

int fallocate(int file, int mode, off_t offset, off_t size) {
    FAIL_IF_HIT("reserve", 1, file, NULL)
    return REAL(fallocate)(file, mode, offset, size);
}
int fallocate64(int file, int mode, off64_t offset, off64_t size) {
    FAIL_IF_HIT("reserve", 1, file, NULL)
    return REAL(fallocate64)(file, mode, offset, size);
}

int rename(const char *from, const char *to) {
    FAIL_IF_HIT("rename", 0, AT_FDCWD, from)
    return REAL(rename)(from, to);
}
int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    FAIL_IF_HIT("rename", 0, from_directory, from)
    return REAL(renameat)(from_directory, from, to_directory, to);
}
int link(const char *from, const char *to) {
    FAIL_IF_HIT("link", 1, AT_FDCWD, to)
    return REAL(link)(from, to);
}
int symlink(const char *target, const char *path) {
    FAIL_IF_HIT("symlink", 1, AT_FDCWD, path)
    return REAL(symlink)(target, path);
}
int unlink(const char *path) {
    FAIL_IF_HIT("unlink", 0, AT_FDCWD, path)
    return REAL(unlink)(path);
}
int unlinkat(int directory, const char *path, int flags) {
    FAIL_IF_HIT("unlink", 0, directory, path)
    return REAL(unlinkat)(directory, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    FAIL_IF_HIT("mkdir", 1, AT_FDCWD, path)
    return REAL(mkdir)(path, mode);
}
int mkdirat(int directory, const char *path, mode_t mode) {
    FAIL_IF_HIT("mkdir", 1, directory, path)
    return REAL(mkdirat)(directory, path, mode);
}
int rmdir(const char *path) {
    FAIL_IF_HIT("rmdir", 0, AT_FDCWD, path)
    return REAL(rmdir)(path);
}

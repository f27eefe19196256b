#!/usr/bin/env python3
"""The commands for accounts, in a sandbox without root: they change /etc/passwd, /etc/group and folders.

The owner of a file cannot be changed in a sandbox, so chown and chgrp only check their arguments, and su and
sudo run commands as the one user that there is.
"""

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

SHORT = {
    "groups": "G", "home-dir": "d", "shell": "s", "create-home": "m", "append": "a", "uid": "u", "gid": "g",
    "remove": "r", "comment": "c", "password": "p", "login": "l",
}  # fmt: skip
LONG_WITH_VALUE = ("gecos", "home", "ingroup", "expiredate", "inactive", "skel", "key", "base-dir")
"""Long options with a value that have no letter here."""
PASSWD, GROUP = pathlib.Path("/etc/passwd"), pathlib.Path("/etc/group")


def rows(path):
    return [line.split(":") for line in path.read_text().splitlines() if line]


def save(path, table):
    path.write_text("".join(":".join(row) + "\n" for row in table))


def fail(message):
    sys.exit(f"{os.path.basename(sys.argv[0])}: {message}")


def parse(arguments, with_value):
    """Return options and words; letters in ``with_value`` take a value."""
    options, words, rest = {}, [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and (name in LONG_WITH_VALUE or SHORT.get(name, " ") in with_value):
                value = rest.pop(0) if rest else fail(f"--{name} needs a value")
            options[SHORT.get(name, name)] = value
        elif word.startswith("-") and len(word) > 1:
            for i, letter in enumerate(word[1:], 2):
                options[letter] = ""
                if letter in with_value:
                    options[letter] = word[i:] or (rest.pop(0) if rest else fail(f"-{letter} needs a value"))
                    break
        else:
            words.append(word)
    return options, words or fail("a name is missing")


def free(table):
    return str(max([999, *(int(row[2]) for row in table if 1000 <= int(row[2]) < 60000)]) + 1)


def join(groups, name, wanted):
    for group in filter(None, wanted.split(",")):
        row = next((row for row in groups if row[0] == group), None) or fail(
            f"group '{group}' does not exist"
        )
        members = [member for member in row[3].split(",") if member]
        row[3] = ",".join(members if name in members else [*members, name])


def groupadd(arguments):
    options, (name, *_) = parse(arguments, "g")
    groups = rows(GROUP)
    if any(row[0] == name for row in groups):
        fail(f"group '{name}' already exists")
    save(GROUP, [*groups, [name, "x", options.get("g") or free(groups), ""]])


def groupdel(arguments):
    _, (name, *_) = parse(arguments, "")
    groups = rows(GROUP)
    if all(row[0] != name for row in groups):
        fail(f"group '{name}' does not exist")
    save(GROUP, [row for row in groups if row[0] != name])


def useradd(arguments):
    options, (name, *more) = parse(arguments, "sGdugcpkefb")
    users, groups = rows(PASSWD), rows(GROUP)
    if os.path.basename(sys.argv[0]) == "adduser":
        if more:
            return usermod(["-a", "-G", more[0], name])
        options = {"m": "", "d": options.get("home", ""), "G": options.get("ingroup", ""), **options}
    if any(row[0] == name for row in users):
        fail(f"user '{name}' already exists")
    uid, home = options.get("u") or free(users), options.get("d") or f"/home/{name}"
    join(groups, name, options.get("G", ""))
    if not any(row[0] == name for row in groups):
        groups.append([name, "x", uid, ""])
    save(GROUP, groups)
    save(PASSWD, [*users, [name, "x", uid, uid, options.get("c", ""), home, options.get("s") or "/bin/sh"]])
    if "m" in options:
        os.makedirs(home, exist_ok=True)


def usermod(arguments):
    options, (name, *_) = parse(arguments, "sGdugcpl")
    users, groups = rows(PASSWD), rows(GROUP)
    row = next((row for row in users if row[0] == name), None) or fail(f"user '{name}' does not exist")
    row[5], row[6] = options.get("d") or row[5], options.get("s") or row[6]
    if "G" in options:
        for group in groups if "a" not in options else []:
            group[3] = ",".join(member for member in group[3].split(",") if member != name)
        join(groups, name, options["G"])
    row[0] = options.get("l") or row[0]
    save(PASSWD, users)
    save(GROUP, groups)


def userdel(arguments):
    options, (name, *_) = parse(arguments, "")
    users, groups = rows(PASSWD), rows(GROUP)
    row = next((row for row in users if row[0] == name), None) or fail(f"user '{name}' does not exist")
    save(PASSWD, [other for other in users if other is not row])
    for group in groups:
        group[3] = ",".join(member for member in group[3].split(",") if member != name)
    save(GROUP, [group for group in groups if group[0] != name])
    if "r" in options:
        shutil.rmtree(row[5], ignore_errors=True)


def deluser(arguments):
    options, (name, *more) = parse(arguments, "")
    if more:
        return gpasswd(["-d", name, more[0]])
    userdel(["-r", name] if "remove-home" in options else [name])


def gpasswd(arguments):
    """Add (-a) or remove (-d) a member of a group."""
    options, (group, *_) = parse(arguments, "adAM")
    name = options.get("a") or options.get("d") or fail("only -a and -d are known here")
    if "a" in options:
        return usermod(["-a", "-G", group, name])
    groups = rows(GROUP)
    row = next((row for row in groups if row[0] == group), None) or fail(f"group '{group}' does not exist")
    row[3] = ",".join(member for member in row[3].split(",") if member != name)
    save(GROUP, groups)


def chown(arguments):
    _, (owner, *paths) = parse(arguments, "")
    user, _, group = owner.replace(".", ":").partition(":")
    if os.path.basename(sys.argv[0]) == "chgrp":
        user, group = "", owner
    for name, table in ((user, PASSWD), (group, GROUP)):
        if name and not name.isdigit() and all(row[0] != name for row in rows(table)):
            fail(f"invalid user: '{owner}'")
    for path in paths:
        if not os.path.lexists(path):
            fail(f"cannot access '{path}': No such file or directory")


def su(arguments):
    """Run a command or a shell for another user; --enter prints how a shell becomes one of that user."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--command", "--session-command")
    parser.add_argument("-s", "--shell", default="/bin/bash")
    parser.add_argument("-u", "--user")
    for names in (("-l", "--login"), ("-m", "-p", "--preserve-environment"), ("--enter",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER if "-u" in arguments else "*")
    given = parser.parse_intermixed_args(arguments) if "-u" not in arguments else parser.parse_args(arguments)
    words = [word for word in given.words if word not in ("-", "--")]
    name = given.user or (words.pop(0) if words else "root")
    row = next((row for row in rows(PASSWD) if row[0] == name), None) or fail(f"user {name} does not exist")
    login = given.login or "-" in given.words
    env = {"USER": name, "LOGNAME": name, "HOME": row[5]}
    if given.enter:
        print("export", *(f"{key}={shlex.quote(value)}" for key, value in env.items()))
        print(f"cd {shlex.quote(row[5])}" if login else "")
        return
    if login and os.path.isdir(row[5]):
        os.chdir(row[5])
    command = [] if given.command is None else ["-c", given.command]
    program = words if given.user else [given.shell, *command, *words]
    sys.exit(subprocess.call(program, env={**os.environ, **env}))


def sudo(arguments):
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[2 if arguments[0] in ("-u", "-g") else 1 :]
    if arguments:
        sys.exit(subprocess.call(arguments))


def passwd(_):
    sys.stdin.read()


COMMANDS = {
    "useradd": useradd, "adduser": useradd, "groupadd": groupadd, "addgroup": groupadd, "usermod": usermod,
    "userdel": userdel, "groupdel": groupdel, "chown": chown, "chgrp": chown, "su": su, "runuser": su,
    "deluser": deluser, "delgroup": groupdel, "gpasswd": gpasswd,
    "sudo": sudo, "passwd": passwd, "chpasswd": passwd,
}  # fmt: skip
if __name__ == "__main__":
    try:
        COMMANDS[os.path.basename(sys.argv[0])](sys.argv[1:])
    except OSError as error:
        fail(error)

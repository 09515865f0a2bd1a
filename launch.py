from cp_engine.cli import main

if __name__ == "__main__":
    main()
